package rooms;

import java.lang.invoke.MethodHandles;
import java.lang.reflect.Field;
import java.util.List;
import java.util.Map;

import org.apache.activemq.artemis.api.core.Message;
import org.apache.activemq.artemis.api.core.SimpleString;
import org.apache.activemq.artemis.core.persistence.StorageManager;
import org.apache.activemq.artemis.core.persistence.impl.journal.LargeServerMessageImpl;
import org.apache.activemq.artemis.core.postoffice.RoutingStatus;
import org.apache.activemq.artemis.core.protocol.stomp.ActiveMQStompException;
import org.apache.activemq.artemis.core.protocol.stomp.Stomp;
import org.apache.activemq.artemis.core.protocol.stomp.StompConnection;
import org.apache.activemq.artemis.core.protocol.stomp.StompFrame;
import org.apache.activemq.artemis.core.protocol.stomp.StompFrameInterceptor;
import org.apache.activemq.artemis.core.protocol.stomp.StompSession;
import org.apache.activemq.artemis.core.protocol.stomp.StompSubscription;
import org.apache.activemq.artemis.core.server.ActiveMQServer;
import org.apache.activemq.artemis.core.server.MessageReference;
import org.apache.activemq.artemis.core.server.Queue;
import org.apache.activemq.artemis.core.server.ServerConsumer;
import org.apache.activemq.artemis.core.transaction.Transaction;
import org.apache.activemq.artemis.spi.core.protocol.RemotingConnection;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Copies what a STOMP client rejects by NACK to the dead-letter address.
 *
 * <p>Artemis handles a NACK as an ACK, and so destroys the message. The copy is sent in the transaction in
 * which the broker then acknowledges the original: both happen or neither. If the copy is not possible, the
 * connection is closed, and the client receives the message again.
 */
public final class NackInterceptor implements StompFrameInterceptor {

   private static final Logger LOG = LoggerFactory.getLogger(MethodHandles.lookup().lookupClass());
   private static final Field SUBSCRIPTIONS = subscriptionsField();

   // The acknowledgement mode of a subscription is not public. Without it the broker must not start.
   private static Field subscriptionsField() {
      try {
         Field field = StompSession.class.getDeclaredField("subscriptions");
         field.setAccessible(true);
         return field;
      } catch (NoSuchFieldException e) {
         throw new IllegalStateException(
            "this version of Artemis keeps the subscriptions of a STOMP session elsewhere", e);
      }
   }

   @Override
   public boolean intercept(StompFrame frame, RemotingConnection connection) {
      if (!Stomp.Commands.NACK.equals(frame.getCommand())) {
         return true;
      }
      StompConnection stomp = (StompConnection) connection;
      // The broker answers with an error. STOMP 1.0 has no NACK.
      if (!stomp.isValid() || stomp.getVersion().equals("1.0")) {
         return true;
      }
      try {
         copyRejected(frame, stomp);
         return true;
      } catch (Exception e) {
         LOG.error("a NACK of {} cannot be handled; its connection is closed", connection.getRemoteAddress(), e);
         ActiveMQStompException error = new ActiveMQStompException(stomp, "this message cannot be rejected now");
         error.setBody("Nothing was rejected. The broker's log has the reason.");
         error.setDisconnect(true);
         stomp.sendFrame(error.getFrame(), null);
         return false;
      }
   }

   private static void copyRejected(StompFrame frame, StompConnection stomp) throws Exception {
      // STOMP 1.2 has the header id, 1.1 message-id. The value is the consumer's id, a comma, the message's id.
      String ack = frame.getHeader(Stomp.Headers.Ack.ID);
      String[] ids = String.valueOf(ack != null ? ack : frame.getHeader(Stomp.Headers.Ack.MESSAGE_ID)).split(",");
      if (ids.length != 2) {
         return;
      }
      long consumerId = Long.parseLong(ids[0]);
      long messageId = Long.parseLong(ids[1]);
      StompSession session = stomp.getSession();
      StompSubscription subscription = ((Map<?, StompSubscription>) SUBSCRIPTIONS.get(session)).get(consumerId);
      ServerConsumer consumer = session.getCoreSession().locateConsumer(consumerId);
      String named = frame.getHeader(Stomp.Headers.Ack.SUBSCRIPTION);
      if (subscription == null || consumer == null || named != null && !named.equals(subscription.getID())) {
         return;
      }
      boolean single = subscription.getAck().equals(Stomp.Headers.Subscribe.AckModeValues.CLIENT_INDIVIDUAL);
      List<MessageReference> rejected = consumer.scanDeliveringReferences(
         false, reference -> !single || id(reference) == messageId, reference -> id(reference) == messageId);
      if (rejected.isEmpty() || id(rejected.get(rejected.size() - 1)) != messageId) {
         return;
      }
      ActiveMQServer server = stomp.getManager().getServer();
      Transaction transaction = session.getCoreSession().getCurrentTransaction();
      for (MessageReference reference : rejected) {
         copy(reference, transaction, server);
      }
   }

   private static void copy(MessageReference reference, Transaction transaction, ActiveMQServer server)
      throws Exception {
      Queue queue = reference.getQueue();
      SimpleString address = queue.getDeadLetterAddress();
      if (address == null) {
         throw new IllegalStateException("the address " + queue.getAddress() + " has no dead-letter address");
      }
      StorageManager storage = server.getStorageManager();
      Message copy = reference.getMessage().copy(storage.generateID(), true);
      copy.setAddress(address);
      copy.referenceOriginalMessage(reference.getMessage(), queue.getName());
      copy.setExpiration(0);
      copy.setRoutingType(null);
      copy.reencode();
      copy = LargeServerMessageImpl.checkLargeMessage(copy, storage);
      RoutingStatus status = server.getPostOffice().route(copy, transaction, false, false);
      if (status != RoutingStatus.OK) {
         throw new IllegalStateException("nothing takes what is sent to " + address + ": " + status);
      }
   }

   private static long id(MessageReference reference) {
      return reference.getMessageID();
   }
}
